"""The connector's parts on a real daemon."""
