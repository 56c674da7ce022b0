"""Queries beside `solve`: LP-MAP and exact decoding, assignments checked and scored, losses."""
