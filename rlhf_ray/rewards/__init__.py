"""Where rewards come from: models, services, a user's function, rules; and how several of them make one number."""
