"""Warm and cold shutdown."""
