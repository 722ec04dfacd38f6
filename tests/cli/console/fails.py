import lockstep

with lockstep.Run("train", replicas=2) as run:
    if run.world.rank == 1:
        raise ValueError("bad sample 17")
