"""Sources of rewards: models, HTTP services, user functions, rules; and their weighted sum."""
