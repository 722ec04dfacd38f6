"""`lockstep bench`: a script on several layouts, what it took there, and what a model says of others."""
