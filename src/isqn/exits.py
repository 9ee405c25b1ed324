"""Exit codes of the command and of the workers of a study."""

DONE, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 75  # stopped and saved, can be resumed (EX_TEMPFAIL, on which schedulers may requeue a job)
KEYBOARD = 130  # Ctrl-C, with nothing saved
