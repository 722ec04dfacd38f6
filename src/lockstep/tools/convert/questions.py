"""Texts of the questions and notes that `lockstep convert` leaves to the user."""

LOADER = (
    "the batches of this loop come from {0}, not from a DataLoader that was found; every rank would train on "
    "all of them: go over run.loader(dataset, batch_size=...)"
)
BATCH_SAMPLER = "batches of a batch_sampler are the global ones now: it must yield those of all ranks, not of one"
SHARE = "a rank sees its share of this loader: run.mean and run.sum go over all of it"
BATCH_SIZE = "batch_size is that of all ranks together now: is it here?"
PARAMETERS = (
    "the parameters of this optimizer cannot be followed to a model: give the model to run.model before this "
    "line, and the optimizer to run.optimizer"
)
FROZEN = "a run refuses to freeze or unfreeze parameters after run.model: delete this; only parameters of an optimizer change"
OPTIMIZER = "{0} cannot be followed to where it is made: give it to run.optimizer or run.scheduler"
EPOCHS = "epochs are not counted by range(...): let this loop go over run.epochs(number of epochs)"
START = "a run that continues after a crash counts epochs by itself, and this start comes from a file that may have changed by then: let the number of epochs be the same at each launch"
OUTSIDE = (
    "this is in no training loop that was found: run.backward belongs into a loop over run.loader"
)
BACKWARD = "run.backward takes the loss alone, once per update: add losses up"
EVERY = (
    "iterations are microbatches, of which a rank has as many as it hosts replicas: take each step in each "
    "iteration, multiply batch_size (or the batches of a batch sampler) instead, and divide no loss by it"
)
SKIPS = "this skips microbatches, which are parts of a batch: a batch is the same on all layouts, its parts are not"
SUMS = (
    "gradients are averaged over replicas, and this loss is a sum over samples: multiply it by run.replicas, or "
    "take the mean"
)
WEIGHT = "this loss is a mean over something else than samples, such as tokens or weights of classes: give run.backward their number or sum as weight="
SIZE = "{0} is the size of a whole batch, and an iteration has the part of one replica: take the length of what it has"
SEED = "this seed is not seen where the run begins: give it to lockstep.Run as seed="
LEAVES = (
    "this leaves a loop whose iterations are not the same on all layouts: count with run.step, and leave between "
    "the batches of run.batches"
)
CARRIED = "{0} goes from one iteration to the next, and the loss follows from it: iterations are microbatches, of which a rank has as many as it hosts replicas"
RATE = "this counts microbatches, of which a rank has as many as it hosts replicas: give a scheduler to run.scheduler, or count run.step"
OWN = "this follows from what one rank has seen in training: run.mean over the loop that trains is the same on all ranks"
UPDATES = "this batch has several updates: give each a pass over run.batches"
COLLECTIVE = "{0}: sums over ranks are run.sum and run.mean, over all samples"
RANK = "what follows from the rank differs between layouts: leave the rank out"
DIVIDED = "this divides a sum over ranks: take it away with the sum"
SAMPLER = "run.loader shuffles by the seed of the run, and leaves out no samples: drop_last= and seed= of the sampler are gone"
PART = "this is a rank's part of the data: run.loader splits all of it"
TAKEN = "the run does this: take it away"
SPAWN = "lockstep run starts the ranks: call the function itself, without its rank"
SCALER = "the run scales losses: take the scaler away"
SAVE = "every rank writes this file: put it under if run.is_main_process"
CLASS = "methods of this class need the run: give it to __init__, and keep it as self.{0}"
CALLER = "no call of this function was found: it has the parameter {0} now"

ACCUMULATED = "{0} batches were one step: they are one batch now; what is left of them at the end of an epoch is a step, too"
NORMALISED = "BatchNorm has statistics of its own in each of {0} replicas; run.sync_batchnorm(model) keeps those of the whole batch, and needs a rank for each replica"
PER_RANK = "{0} was the batch size of a rank: the batch of all {1} replicas is {0} * run.replicas"
SHOWN = "{0} in line {1} adds up microbatches of one rank, not batches: run.mean over the loop that trains is the mean over all samples"
