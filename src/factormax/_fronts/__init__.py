"""Fronts: each knows one array library, and keeps its tape."""
