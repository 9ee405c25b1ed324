"""Exit codes of the command and of the workers of a study."""

DONE, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 75  # EX_TEMPFAIL: saved, can be resumed; schedulers may requeue on it
KEYBOARD = 130  # Ctrl-C without anything saved
