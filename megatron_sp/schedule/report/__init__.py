"""Reports on schedules: as a tree, as a picture, in bytes, and as differences."""
