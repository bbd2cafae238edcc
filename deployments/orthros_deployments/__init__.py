"""The wiring of the service to Ray Serve and Ray Data, and the `orthros` command."""
