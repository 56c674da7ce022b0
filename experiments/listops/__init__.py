"""ListOps valency tagging: how many arguments has an operator, as seen through a latent tree?"""
