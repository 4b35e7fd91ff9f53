"""The package that imports Ray: a session with a cluster, pools of resources, submitted jobs."""
