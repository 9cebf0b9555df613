"""What a schedule consists of: directives, paths, meshes, placements."""
