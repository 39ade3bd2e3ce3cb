"""Engines that solve integer and constraint programs, and how a search is watched."""
