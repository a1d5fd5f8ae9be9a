"""Why a run ends before its time. The command line prints the text as one line and ends with status 1."""


class RunFailed(Exception):
    """Going on would be for nothing; the text says why and what to look at."""


class Stalled(RunFailed):
    """Nothing moved for longer than an attempt may take."""


class NothingMeasured(RunFailed):
    """No held-out rollout could be judged, or no agent got as far as one call."""


class CannotWrite(RunFailed):
    """The run's folder takes no more."""


class WrongVersion(RunFailed):
    """The engine does not serve what the trainer writes."""


class NotFinite(RunFailed):
    """One update after the other was skipped: `trainer.safety.skipped_updates` in a row."""


class TooManyFailed(RunFailed):
    """A batch failed by infrastructure, and so did those that were made in its place."""


class AllAlike(RunFailed):
    """All rollouts of a batch failed in the same way."""


class RowTooLong(RunFailed):
    """A row is longer than `trainer.row_tokens`, and `trainer.overlong` is `fail`."""
