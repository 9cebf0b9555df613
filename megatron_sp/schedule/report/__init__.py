"""Schedules shown: as a tree, a picture, bytes and time, differences."""
