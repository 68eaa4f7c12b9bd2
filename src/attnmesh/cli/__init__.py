"""The command `attnmesh`: one file per subcommand, output, and the launch of ranks."""
