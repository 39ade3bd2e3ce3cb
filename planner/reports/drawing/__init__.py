"""Artefacts as pictures: in text for the terminal, and as SVG."""
