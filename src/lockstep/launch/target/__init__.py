"""Analysis of the user's script before it runs: its source, its imports, and imports shared by ranks."""
