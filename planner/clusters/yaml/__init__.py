"""Topologies as YAML files."""
