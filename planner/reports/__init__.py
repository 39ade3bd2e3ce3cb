"""Artefacts as rows of plain text and as the machine's JSON, a file per subject."""
