"""What any module may need: memos by identity, compiled functions, caches, types of arrays."""
