"""A checkpoint written in one block, for tests of what comes before and after it."""

from contextlib import contextmanager


@contextmanager
def new_checkpoint(store, step):
    """`CheckpointStore.begin`, what the block writes, `commit`; an error in the block removes what was written."""
    directory = store.begin(step)
    with store.whole_or_nothing(directory, step):
        yield directory
    store.commit(directory, step)
