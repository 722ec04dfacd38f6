"""`lockstep bench`: measure a script on several layouts, and project its step time to other layouts."""
