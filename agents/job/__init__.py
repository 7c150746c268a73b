"""The part of ringtap that runs a job: its supervisor, signals and the connection to the node's agent."""
