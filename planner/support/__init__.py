"""What any module may need: memos by identity, compiled functions, types of arrays."""
