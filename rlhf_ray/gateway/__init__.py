"""The URL at which agents ask the policy: OpenAI's chat completions and Anthropic's messages, one session for each
attempt at an episode."""
