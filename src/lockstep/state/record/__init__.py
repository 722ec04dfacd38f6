"""Files that a run writes about itself: events, trace, step records, logs, error reports, progress."""
