"""How ranks and launchers meet: the port of the job's store, who came, and who reaches whom."""
