"""`lockstep.Run` and its parts: loop, loaders, models, optimizers, metrics, checkpointing."""
