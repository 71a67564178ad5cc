"""Advantage actor-critic on a vectorized pole-balancing environment written in numpy."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class VecCartPole:
    def __init__(self, n):
        self.n = n
        self.rng = np.random.default_rng(0)
        self.state = self.rng.uniform(-0.05, 0.05, (n, 4))

    def step(self, action):
        x, v, a, w = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        temp = (force + 0.05 * w**2 * np.sin(a)) / 1.1
        acc = (9.8 * np.sin(a) - np.cos(a) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(a) ** 2 / 1.1))
        v_acc = temp - 0.05 * acc * np.cos(a) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * v_acc, a + 0.02 * w, w + 0.02 * acc], 1)
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.209)
        self.state[done] = self.rng.uniform(-0.05, 0.05, (int(done.sum()), 4))
        return self.obs(), np.ones(self.n, np.float32), done

    def obs(self):
        return torch.as_tensor(self.state, dtype=torch.float32)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


envs, agent = VecCartPole(16), ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=7e-4, eps=1e-5)
T, gamma = 16, 0.99
obs = envs.obs()

for update in range(150):
    memory = []
    with torch.no_grad():
        for _ in range(T):
            dist, value = agent(obs)
            action = dist.sample()
            next_obs, reward, done = envs.step(action.numpy())
            memory.append((obs, action, torch.from_numpy(reward), torch.from_numpy(done).float()))
            obs = next_obs
        _, ret = agent(obs)
        returns = []
        for _, _, reward, done in reversed(memory):
            ret = reward + gamma * ret * (1 - done)
            returns.insert(0, ret)

    b_obs = torch.cat([m[0] for m in memory])
    b_act = torch.cat([m[1] for m in memory])
    b_ret = torch.cat(returns)
    dist, value = agent(b_obs)
    advantage = b_ret - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -(dist.log_prob(b_act) * advantage).mean()
    value_loss = (b_ret - value).pow(2).mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()

    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    if update % 25 == 0:
        print(f"update {update} value loss {value_loss.item():.3f}")
