"""Many workers: the runner plans, publishes and commits; workers generate, by way of dask.distributed."""
