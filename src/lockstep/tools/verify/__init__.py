"""`lockstep verify`: run a script on several layouts, and compare every step of the runs."""
