"""The parts of `lockstep.Run`: loop, loaders, models, optimizers, metrics, audit, watchdog."""
