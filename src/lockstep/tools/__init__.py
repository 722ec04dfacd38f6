"""Command-line tools: check, convert, bench, doctor, verify, replay, report, watch, submit."""
