"""`lockstep replay` and `lockstep branch`: start a recorded run again, from one of its states."""
