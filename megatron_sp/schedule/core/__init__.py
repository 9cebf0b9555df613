"""Parts of a schedule: directives, paths, meshes."""
