"""The only package that imports DeepSpeed: build an engine, step it, save and load its state, gather its weights."""
