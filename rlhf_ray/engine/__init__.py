"""The one room that imports DeepSpeed: build an engine, step it, save and load it, gather its weights."""
