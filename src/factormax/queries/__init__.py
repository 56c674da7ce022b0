"""The queries: `solve`, LP-MAP, exact decoding and losses; checking and scoring of assignments."""
