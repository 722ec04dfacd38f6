"""Tools beside a run: check, convert, bench, doctor, verify, report, watch, submit."""
