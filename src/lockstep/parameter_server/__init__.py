"""Parameter servers: their process, how workers find and reach it, and the strategy `ps` on top of that."""
