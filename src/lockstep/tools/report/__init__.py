"""`lockstep report`: show the records of runs as one HTML page that needs no network."""
