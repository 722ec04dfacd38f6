"""What is launched: the script, its imports and what is preloaded for it."""
