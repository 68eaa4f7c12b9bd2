"""The command `attnmesh`: one file a subcommand, output, and the launch of ranks."""
