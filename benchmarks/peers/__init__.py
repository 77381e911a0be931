"""What watching costs beside other open monitors."""
