"""One module per environment: `detect(environ)` gives a `World`, or `None` where it is not the one."""
