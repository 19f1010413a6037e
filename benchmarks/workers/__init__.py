"""What runs in the processes of a case. A worker uses the public names of Paceline, so that it can measure
other versions, too (`--before`)."""
