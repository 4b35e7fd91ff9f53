"""Rewards from services over HTTP: which addresses may be asked, one try, several servers, and the source itself."""
