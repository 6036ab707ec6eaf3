"""Rewards that come with the recipes, one a file. Scorers load them by path, as they load a user's own."""
