"""Mutations: each takes a source of random numbers and something valid, and returns it changed,
with a few words on how. Whatever they draw follows from the seed alone.
"""
