"""Reports: what runs have recorded, as one HTML page that needs no network."""
