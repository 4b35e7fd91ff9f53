"""Data sets: prompts, demonstrations, preferences; the quickstart's own reviews; how rows are cut into batches."""
